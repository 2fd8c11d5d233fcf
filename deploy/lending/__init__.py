"""`rollfab lend`: the switch, its log, and its report."""
