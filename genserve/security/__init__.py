"""Who may do what, and over which connections: roles, tokens, certificates. It knows no service and no client."""
