-- Deletes expired nonces. Parameters: now_s.
delete from webhook_nonces where until_s <= :now_s
