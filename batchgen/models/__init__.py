"""Model families. One file per architecture over the shared blocks; `registry` finds the right one."""
