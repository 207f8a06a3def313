"""The only room with sockets, processes and the wall clock."""
