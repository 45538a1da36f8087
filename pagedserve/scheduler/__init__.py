"""Who runs when, and what gives way when memory runs out. `scheduler.Scheduler` is the face of this room."""
