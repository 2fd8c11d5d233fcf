"""Every port on a real broker (Redis or Valkey): the only room that says `redis`."""
