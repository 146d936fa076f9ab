-- Raises, before a script writes anything, when a key that every job passes through has another type; the caller
-- then runs mend-16.lua and repeats the script. What is written to the other keys may fail: no job depends on it.
call('LLEN', WAIT)
call('LLEN', ACTIVE)
call('ZCARD', PRIORITIZED)
call('ZCARD', DELAYED)
call('ZCARD', COMPLETED)
call('ZCARD', FAILED)
call('ZCARD', CHILDREN)
