"""The capacity controller: the only writer of leases."""
