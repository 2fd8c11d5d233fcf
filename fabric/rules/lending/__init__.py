"""Rules of lending: how much of which worker a run gets."""
