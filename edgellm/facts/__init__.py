"""Read-only probes of a host: each is one round trip, each returns a typed value."""
