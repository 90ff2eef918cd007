"""One file a command; each is a thin wrapper that parses options and prints."""
