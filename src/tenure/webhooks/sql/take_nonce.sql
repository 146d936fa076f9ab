-- Inserts a nonce: one row for the first caller, none for later ones. Parameters: nonce, until_s.
insert into webhook_nonces (nonce, until_s) values (:nonce, :until_s) on conflict do nothing
