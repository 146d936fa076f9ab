-- The nonces that a receiver has seen, and the times until which they are kept.
create table if not exists webhook_nonces (
  nonce text primary key,
  until_s real not null
) without rowid;
create index if not exists webhook_nonces_until on webhook_nonces (until_s);
