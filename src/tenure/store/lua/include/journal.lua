-- The journal of a queue. Events are collected while a script runs and appended at its end, in their order: an XADD
-- for each would cost more than the rest of the script. An entry holds up to a hundred events, a field `e` each. If the
-- same event happens to five or more consecutive jobs, their entry has the common end of the line once (`s`) and their
-- ids joined by tabs (`ids`), because every field costs Redis time, and every new text costs Lua time. store/journal.py
-- reads both forms. The including script has JOURNAL.
local entries = {} -- the fields of each entry
local lines = {} -- the fields of the entry that is being filled: name, event, name, event, ...
local lines_n = 0
local run = {} -- the ids of jobs whose lines end in `run_tail`
local run_n = 0
local run_tail
local RUN_LEAST, ENTRY_MOST = 5, 100

local function close_entry()
  if lines_n > 0 then
    entries[#entries + 1] = lines
    lines, lines_n = {}, 0
  end
end

local function end_run()
  if run_n >= RUN_LEAST then
    close_entry()
    entries[#entries + 1] = { 's', run_tail, 'ids', table.concat(run, '\t', 1, run_n) }
  else
    for at = 1, run_n do
      if lines_n >= 2 * ENTRY_MOST then
        close_entry()
      end
      lines[lines_n + 1], lines[lines_n + 2] = 'e', run[at] .. run_tail
      lines_n = lines_n + 2
    end
  end
  run_n = 0
end

-- Adds one event of one job; `tail` is its line without the id. No id may contain a tab.
local function add_line(id, tail)
  if run_tail ~= tail or run_n >= ENTRY_MOST then
    end_run()
    run_tail = tail
  end
  run_n = run_n + 1
  run[run_n] = id
end

-- Appends the collected events; `append` runs a command on a key of the queue.
local function flush_journal(append)
  end_run()
  close_entry()
  for i = 1, #entries do
    append('XADD', JOURNAL, '*', unpack(entries[i]))
  end
  entries = {}
end
