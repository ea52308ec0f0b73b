"""`aligner studio`: web pages over folders of runs. A page keeps nothing that is not in files; closing a tab, or killing the server,
changes no run."""
