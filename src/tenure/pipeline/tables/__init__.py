"""Tables made from events: each is an SQL file of this folder."""
