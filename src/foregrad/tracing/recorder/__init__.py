"""The dispatch mode that runs a function on fakes and writes its operators to the tape."""
