"""Authentication and rate limits: certificates, identities, limits."""
