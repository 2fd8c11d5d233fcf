"""The way to a broker (Redis or Valkey): URL, connections, cluster, Sentinel, and one of our own."""
