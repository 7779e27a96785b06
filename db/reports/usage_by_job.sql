-- GPU time of each job by activity, effective steps, and GPU-hours per step.
-- A step is an optim_step call that is done and was not skipped. Idle and down time is nobody's and not in here.
-- slurm_id is the number that all commands take; job_id the row of this database.
WITH charged AS (
    SELECT job_id,
           SUM(CASE WHEN activity = 'busy' THEN gpu_us ELSE 0 END) AS busy,
           SUM(CASE WHEN activity = 'switch' THEN gpu_us ELSE 0 END) AS switch,
           SUM(CASE WHEN activity = 'kept' THEN gpu_us ELSE 0 END) AS kept,
           SUM(gpu_us) AS bill
    FROM ledger
    WHERE job_id IS NOT NULL
    GROUP BY job_id
),
stepped AS (
    SELECT job_id, COUNT(*) AS steps
    FROM calls
    WHERE kind = 'optim_step' AND state = 'done' AND message = ''
    GROUP BY job_id
)
SELECT j.partition, j.slurm_id, j.id AS job_id, j.name, j."user", j.account, j.state,
       CAST(COALESCE(SUM(c.busy), 0) AS BIGINT) AS busy_gpu_us,
       CAST(COALESCE(SUM(c.switch), 0) AS BIGINT) AS switch_gpu_us,
       CAST(COALESCE(SUM(c.kept), 0) AS BIGINT) AS kept_gpu_us,
       CAST(COALESCE(SUM(c.bill), 0) AS BIGINT) AS bill_gpu_us,
       CAST(COALESCE(SUM(s.steps), 0) AS BIGINT) AS steps,
       ROUND(CAST(SUM(c.bill) / 3600000000.0 / SUM(s.steps) AS NUMERIC), 9) AS gpu_hours_per_step
FROM jobs AS j
LEFT JOIN charged AS c ON c.job_id = j.id
LEFT JOIN stepped AS s ON s.job_id = j.id
GROUP BY j.partition, j.slurm_id, j.id, j.name, j."user", j.account, j.state
ORDER BY j.partition, j.id;
