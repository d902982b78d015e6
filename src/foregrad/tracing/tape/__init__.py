"""A capture's record: the tape of operators, facts about each, and the graph made of the tape."""
