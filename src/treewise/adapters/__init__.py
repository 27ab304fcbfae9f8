"""treewise behind the interfaces of other libraries, a module each; none is imported unless asked for."""
