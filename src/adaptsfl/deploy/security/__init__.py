"""Who may speak, and how much: certificates, identities, limits."""
