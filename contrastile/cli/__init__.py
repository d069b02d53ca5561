"""The command line: `main` reads the words, one small file per verb does what they ask."""
