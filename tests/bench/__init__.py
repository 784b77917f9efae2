"""Other engines beside ours: installed, started, loaded, stopped and compared. `make bench-peers`."""
