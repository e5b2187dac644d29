"""The round as one pure function: nothing here knows of files."""
