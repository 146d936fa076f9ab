-- One row for the first caller with this nonce, none for the others. Parameters: nonce, until_s.
insert into webhook_nonces (nonce, until_s) values (:nonce, :until_s) on conflict do nothing
