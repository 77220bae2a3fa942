"""carrel under other frameworks for agents: a module for each, which imports its framework."""
