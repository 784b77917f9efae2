"""Files that browsers fetch below /files; a package so that they are installed with the others."""
