"""Facts from the trainer's state: counters, schedules, arguments and data, each with its source."""
