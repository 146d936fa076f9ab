-- Drop what no longer counts. Parameters: now_s.
delete from webhook_nonces where until_s <= :now_s
