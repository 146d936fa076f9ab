"""Jobs that come from other things than a submit: from schedules."""
