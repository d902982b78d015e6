"""What a capture writes: the tape of operators, facts about each, and the graph made of it."""
