-- drop_kept(entry_id…)
-- Forget groups that were kept for people to look at; one that another client dropped before is passed over.
-- keys shard.kept shard.run rows_and_rollouts...
-- flags allow-oom
-- use batch count
for n, entry_id in ipairs(ARGV) do
  local entry = redis.call('XRANGE', shard.kept, entry_id, entry_id)[1]
  if entry then
    redis.call('XDEL', shard.kept, entry_id)
    redis.call('UNLINK', rows_and_rollouts[2 * n - 1], rows_and_rollouts[2 * n])
    tally(shard.run, 'kept_bytes', -whole(entry[2][4], 0))
  end
end
return 1
