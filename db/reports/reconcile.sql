-- Each hold's GPU time in the ledger beside Slurm's own accounting; they must agree within 1 % + 1 s x GPUs.
-- ledger      what the ledger booked on the hold's WPGs, all activities.
-- sacct       AllocTRES gres/gpu x elapsed of every component and incarnation of its Slurm job.
-- difference  ledger - sacct; GPUs of the hold that belong to no WPG show here.
-- allowed     1 % of sacct, and 1 s x GPUs for each incarnation: Slurm counts whole seconds.
-- agrees      yes, no, or unknown: Slurm has not said anything of it yet.
-- Of a hold that was running when sacct was asked last, both are taken up to that instant, or
-- up to its last booked stretch if that ends earlier.
WITH booked AS (
    SELECT hold_id, MAX(stop_us) AS last_us
    FROM ledger
    GROUP BY hold_id
),
closed AS (
    SELECT u.hold_id,
           MIN(CASE WHEN u.end_us IS NULL
                    THEN CASE WHEN b.last_us < u.recorded_us THEN b.last_us ELSE u.recorded_us END
               END) AS until_us
    FROM slurm_usage AS u
    LEFT JOIN booked AS b ON b.hold_id = u.hold_id
    GROUP BY u.hold_id
),
said AS (
    SELECT u.hold_id,
           SUM(u.gpus) AS gpus,
           COUNT(DISTINCT u.slurm_id) AS components,
           COUNT(*) AS incarnations,
           SUM(u.gpus * CASE WHEN u.end_us IS NOT NULL OR u.start_us + u.elapsed_us <= c.until_us
                             THEN u.elapsed_us
                             WHEN u.start_us >= c.until_us THEN 0
                             ELSE c.until_us - u.start_us
                        END) AS gpu_us
    FROM slurm_usage AS u
    JOIN closed AS c ON c.hold_id = u.hold_id
    GROUP BY u.hold_id
),
kept AS (
    SELECT l.hold_id,
           SUM(CASE WHEN c.until_us IS NULL OR l.stop_us <= c.until_us THEN l.gpu_us
                    WHEN l.start_us >= c.until_us THEN 0
                    ELSE CAST(1.0 * l.gpu_us * (c.until_us - l.start_us)
                              / (l.stop_us - l.start_us) AS BIGINT)
               END) AS gpu_us
    FROM ledger AS l
    LEFT JOIN closed AS c ON c.hold_id = l.hold_id
    GROUP BY l.hold_id
),
joined AS (
    SELECT h.partition, h.id AS hold_id, h.slurm_id, h.state,
           s.components, s.incarnations,
           CAST(COALESCE(k.gpu_us, 0) AS BIGINT) AS booked,
           CAST(s.gpu_us AS BIGINT) AS sacct,
           CAST(s.gpu_us / 100 + s.gpus * 1000000 AS BIGINT) AS allowed
    FROM holds AS h
    LEFT JOIN said AS s ON s.hold_id = h.id
    LEFT JOIN kept AS k ON k.hold_id = h.id
    WHERE s.hold_id IS NOT NULL OR (h.backend = 'slurm' AND k.hold_id IS NOT NULL)
)
SELECT partition, hold_id, slurm_id, state, components, incarnations,
       booked AS ledger_gpu_us,
       sacct AS sacct_gpu_us,
       booked - sacct AS difference_gpu_us,
       ROUND(CAST(100.0 * (booked - sacct) / NULLIF(sacct, 0) AS NUMERIC), 3) AS difference_percent,
       allowed AS allowed_gpu_us,
       CASE WHEN sacct IS NULL THEN 'unknown'
            WHEN ABS(booked - sacct) <= allowed THEN 'yes'
            ELSE 'no'
       END AS agrees
FROM joined
ORDER BY partition, hold_id;
