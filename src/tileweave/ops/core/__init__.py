"""What all operators share: registration with torch, groups and workspaces, comparison of calls
between ranks, collectives."""
