"""Who may read, who may control, and from where."""
