"""What a user can say: a module a command, and the few that they share."""
