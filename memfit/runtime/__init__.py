"""What script mode and step mode share while they train: the core, events, faults, loss scale, facts about ranks."""
