"""What all operators share: registration with torch, groups and workspaces, agreement between
ranks, collectives."""
