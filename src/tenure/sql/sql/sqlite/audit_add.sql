-- Writes down an action of a person under the next number of the chain, and forgets the oldest up to a
-- place. A number that another gateway has taken meanwhile writes nothing.
-- Takes: number bigint, prev text, hash text, entry text, pruned bigint
-- Returns: the place of the entry; no row when the number was taken
-- Clauses: I-44
INSERT INTO audit_log (number, prev, hash, entry) SELECT :number, :prev, :hash, :entry
WHERE true ON CONFLICT (number) DO NOTHING;
DELETE FROM audit_log WHERE seq <= :pruned
AND EXISTS (SELECT 1 FROM audit_log WHERE number = :number AND hash = :hash);
SELECT seq FROM audit_log WHERE number = :number AND hash = :hash;
