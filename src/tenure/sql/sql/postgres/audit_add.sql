-- Writes down an action of a person under the next number of the chain, and forgets the oldest up to a
-- place. A number that another gateway has taken meanwhile writes nothing.
-- Takes: number bigint, prev text, hash text, entry text, pruned bigint
-- Returns: the place of the entry; no row when the number was taken
-- Clauses: I-44
WITH added AS (
  INSERT INTO audit_log (number, prev, hash, entry) VALUES (:number, :prev, :hash, :entry)
  ON CONFLICT (number) DO NOTHING RETURNING seq
), pruned AS (
  DELETE FROM audit_log WHERE seq <= :pruned AND EXISTS (SELECT 1 FROM added)
)
SELECT seq FROM added
