-- What each job was charged, and what it would have held on GPUs of its own.
-- bill        GPU time charged to the job: busy + switch + kept.
-- dedicated   GPUs of the WPGs where its deployments and snapshots live, for as long as it ran.
-- idle_share  its part of the idle time: at every instant the idle time of a WPG is split
--             evenly among the jobs that live there and run; what does not divide goes to the
--             lowest job id; idle time while none of them runs is nobody's.
-- saved       dedicated - bill - idle_share. A job still running counts up to the last stretch.
-- slurm_id is the number that all commands take; job_id the row of this database.
WITH latest AS (
    SELECT h.partition, MAX(l.stop_us) AS stop_us
    FROM ledger AS l
    JOIN holds AS h ON h.id = l.hold_id
    GROUP BY h.partition
),
ran AS (
    SELECT j.id AS job_id, j.partition, j.started_us AS lo,
           CASE WHEN COALESCE(j.ended_us, t.stop_us) > j.started_us
                THEN COALESCE(j.ended_us, t.stop_us) ELSE j.started_us END AS hi
    FROM jobs AS j
    LEFT JOIN latest AS t ON t.partition = j.partition
    WHERE j.started_us IS NOT NULL
),
home AS (
    SELECT job_id, wpg FROM deployments
    UNION
    SELECT job_id, wpg FROM snapshots
),
shape AS (
    SELECT h.partition, w.name AS wpg, w.slot, MAX(w.gpus) AS gpus
    FROM wpgs AS w
    JOIN holds AS h ON h.id = w.hold_id
    GROUP BY h.partition, w.name, w.slot
),
-- A job that moved from hold to hold lived in one slot all the time.
lived AS (
    SELECT r.job_id, s.slot, MAX(s.gpus) AS gpus
    FROM ran AS r
    JOIN home AS m ON m.job_id = r.job_id
    JOIN shape AS s ON s.partition = r.partition AND s.wpg = m.wpg
    GROUP BY r.job_id, s.slot
),
dedicated AS (
    SELECT job_id, SUM(gpus) AS gpus
    FROM lived
    GROUP BY job_id
),
-- The part of every idle stretch during which a job lived there and ran ...
presence AS (
    SELECT l.id, r.job_id, l.gpu_us / (l.stop_us - l.start_us) AS gpus,
           CASE WHEN r.lo > l.start_us THEN r.lo ELSE l.start_us END AS lo,
           CASE WHEN r.hi < l.stop_us THEN r.hi ELSE l.stop_us END AS hi
    FROM ran AS r
    JOIN home AS m ON m.job_id = r.job_id
    JOIN ledger AS l ON l.wpg = m.wpg AND l.stop_us > r.lo AND l.start_us < r.hi
    JOIN holds AS h ON h.id = l.hold_id AND h.partition = r.partition
    WHERE l.activity = 'idle' AND l.stop_us > l.start_us
),
-- ... cut where one of them began or ended ...
cut AS (
    SELECT id, lo AS at_us FROM presence
    UNION
    SELECT id, hi FROM presence
),
piece AS (
    SELECT id, at_us AS lo, LEAD(at_us) OVER (PARTITION BY id ORDER BY at_us) AS hi FROM cut
),
-- ... and split evenly.
present AS (
    SELECT p.job_id, (x.hi - x.lo) * p.gpus AS gpu_us,
           COUNT(*) OVER (PARTITION BY x.id, x.lo) AS jobs,
           ROW_NUMBER() OVER (PARTITION BY x.id, x.lo ORDER BY p.job_id) AS place
    FROM piece AS x
    JOIN presence AS p ON p.id = x.id AND p.lo <= x.lo AND p.hi >= x.hi
),
idle AS (
    SELECT job_id,
           CAST(SUM(gpu_us / jobs + CASE WHEN place = 1 THEN gpu_us % jobs ELSE 0 END) AS BIGINT)
               AS gpu_us
    FROM present
    GROUP BY job_id
),
charged AS (
    SELECT job_id,
           CAST(SUM(CASE WHEN activity = 'busy' THEN gpu_us ELSE 0 END) AS BIGINT) AS busy,
           CAST(SUM(CASE WHEN activity = 'switch' THEN gpu_us ELSE 0 END) AS BIGINT) AS switch,
           CAST(SUM(CASE WHEN activity = 'kept' THEN gpu_us ELSE 0 END) AS BIGINT) AS kept,
           CAST(SUM(gpu_us) AS BIGINT) AS bill
    FROM ledger
    WHERE job_id IS NOT NULL
    GROUP BY job_id
),
stepped AS (
    SELECT job_id, COUNT(*) AS steps
    FROM calls
    WHERE kind = 'optim_step' AND state = 'done' AND message = ''
    GROUP BY job_id
),
joined AS (
    SELECT j.partition, j.slurm_id, j.id AS job_id, j.name, j."user", j.account, j.state,
           r.hi - r.lo AS ran_us,
           COALESCE(c.busy, 0) AS busy, COALESCE(c.switch, 0) AS switch,
           COALESCE(c.kept, 0) AS kept, COALESCE(c.bill, 0) AS bill,
           COALESCE(i.gpu_us, 0) AS idle, COALESCE(s.steps, 0) AS steps,
           CAST(COALESCE(d.gpus, 0) AS BIGINT) AS gpus,
           CAST(COALESCE(d.gpus, 0) AS BIGINT) * (r.hi - r.lo) AS dedicated
    FROM ran AS r
    JOIN jobs AS j ON j.id = r.job_id
    LEFT JOIN charged AS c ON c.job_id = r.job_id
    LEFT JOIN idle AS i ON i.job_id = r.job_id
    LEFT JOIN stepped AS s ON s.job_id = r.job_id
    LEFT JOIN dedicated AS d ON d.job_id = r.job_id
)
SELECT partition, slurm_id, job_id, name, "user", account, state,
       ran_us,
       ROUND(CAST(busy / 1000000.0 AS NUMERIC), 3) AS busy_gpu_s,
       ROUND(CAST(switch / 1000000.0 AS NUMERIC), 3) AS switch_gpu_s,
       ROUND(CAST(kept / 1000000.0 AS NUMERIC), 3) AS kept_gpu_s,
       bill AS bill_gpu_us,
       idle AS idle_share_gpu_us,
       steps,
       ROUND(CAST(bill / 1000000.0 / NULLIF(steps, 0) AS NUMERIC), 6) AS gpu_s_per_step,
       ROUND(CAST((bill + idle) / 1000000.0 / NULLIF(steps, 0) AS NUMERIC), 6)
           AS gpu_s_per_step_with_idle,
       gpus AS dedicated_gpus,
       dedicated AS dedicated_gpu_us,
       dedicated - bill - idle AS saved_gpu_us,
       ROUND(CAST(100.0 * (dedicated - bill - idle) / NULLIF(dedicated, 0) AS NUMERIC), 2)
           AS saved_percent
FROM joined
ORDER BY partition, job_id;
