"""The pool of pages as visitors may see it: live, and veiled while battles wait for their vote."""
