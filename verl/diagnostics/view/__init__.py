"""Look at recorded runs: the answers that the page of `verl view` asks for, its server, and the
page as one file."""
