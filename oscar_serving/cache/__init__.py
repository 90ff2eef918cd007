"""Page layout, windows and the position rule, pool and prefix index."""
