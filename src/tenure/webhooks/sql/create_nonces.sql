-- The nonces that a receiver has seen, and until when they count.
create table if not exists webhook_nonces (
  nonce text primary key,
  until_s real not null
) without rowid;
create index if not exists webhook_nonces_until on webhook_nonces (until_s);
