-- GPU time of each UTC day by activity (idle and down too), effective steps, GPU-hours per step.
-- A stretch across midnight is cut there, exactly: the parts of a shared one are taken from a
-- running total that is 0 at its start and gpu_us at its end, in whole seconds of the stretch.
-- Days are turned into dates by arithmetic (after H. Hinnant, days_from_civil), because the
-- two databases have no date function in common.
WITH RECURSIVE piece(id, day, lo, hi) AS (
    SELECT id, start_us / 86400000000, start_us,
           CASE WHEN stop_us <= (start_us / 86400000000 + 1) * 86400000000
                THEN stop_us ELSE (start_us / 86400000000 + 1) * 86400000000 END
    FROM ledger
    UNION ALL
    SELECT p.id, p.day + 1, p.hi,
           CASE WHEN l.stop_us <= (p.day + 2) * 86400000000
                THEN l.stop_us ELSE (p.day + 2) * 86400000000 END
    FROM piece AS p
    JOIN ledger AS l ON l.id = p.id
    WHERE p.hi < l.stop_us
),
measured AS (
    SELECT p.day, l.activity, l.job_id, h.partition,
           CASE WHEN p.lo = l.start_us AND p.hi = l.stop_us THEN l.gpu_us
                ELSE
               (CASE WHEN p.hi = l.stop_us THEN l.gpu_us
                     ELSE l.gpu_us / (l.stop_us - l.start_us) * (p.hi - l.start_us)
                        + l.gpu_us % (l.stop_us - l.start_us)
                          * ((p.hi - l.start_us) / 1000000)
                          / ((l.stop_us - l.start_us) / 1000000 + 1)
                END)
             - (l.gpu_us / (l.stop_us - l.start_us) * (p.lo - l.start_us)
                + l.gpu_us % (l.stop_us - l.start_us)
                  * ((p.lo - l.start_us) / 1000000)
                  / ((l.stop_us - l.start_us) / 1000000 + 1))
           END AS gpu_us
    FROM piece AS p
    JOIN ledger AS l ON l.id = p.id
    JOIN holds AS h ON h.id = l.hold_id
),
spent AS (
    SELECT partition, day,
           SUM(CASE WHEN activity = 'busy' THEN gpu_us ELSE 0 END) AS busy,
           SUM(CASE WHEN activity = 'switch' THEN gpu_us ELSE 0 END) AS switch,
           SUM(CASE WHEN activity = 'kept' THEN gpu_us ELSE 0 END) AS kept,
           SUM(CASE WHEN activity = 'idle' THEN gpu_us ELSE 0 END) AS idle,
           SUM(CASE WHEN activity = 'down' THEN gpu_us ELSE 0 END) AS down,
           SUM(CASE WHEN job_id IS NOT NULL THEN gpu_us ELSE 0 END) AS bill
    FROM measured
    GROUP BY partition, day
),
stepped AS (
    SELECT j.partition, c.ended_us / 86400000000 AS day, COUNT(*) AS steps
    FROM calls AS c
    JOIN jobs AS j ON j.id = c.job_id
    WHERE c.kind = 'optim_step' AND c.state = 'done' AND c.message = ''
    GROUP BY j.partition, c.ended_us / 86400000000
),
era AS (
    SELECT partition, day, busy, switch, kept, idle, down, bill,
           (day + 719468) / 146097 AS n, (day + 719468) % 146097 AS doe
    FROM spent
),
year AS (
    SELECT era.*, (doe - doe / 1460 + doe / 36524 - doe / 146096) / 365 AS yoe FROM era
),
month AS (
    SELECT year.*, doe - (365 * yoe + yoe / 4 - yoe / 100) AS doy,
           (5 * (doe - (365 * yoe + yoe / 4 - yoe / 100)) + 2) / 153 AS mp
    FROM year
),
dated AS (
    SELECT month.*, CASE WHEN mp < 10 THEN mp + 3 ELSE mp - 9 END AS m,
           doy - (153 * mp + 2) / 5 + 1 AS d
    FROM month
)
SELECT e.partition,
       CAST(e.n * 400 + e.yoe + CASE WHEN e.m <= 2 THEN 1 ELSE 0 END AS TEXT)
           || '-' || SUBSTR(CAST(100 + e.m AS TEXT), 2)
           || '-' || SUBSTR(CAST(100 + e.d AS TEXT), 2) AS day,
       CAST(e.busy AS BIGINT) AS busy_gpu_us,
       CAST(e.switch AS BIGINT) AS switch_gpu_us,
       CAST(e.kept AS BIGINT) AS kept_gpu_us,
       CAST(e.idle AS BIGINT) AS idle_gpu_us,
       CAST(e.down AS BIGINT) AS down_gpu_us,
       CAST(e.bill AS BIGINT) AS bill_gpu_us,
       COALESCE(s.steps, 0) AS steps,
       ROUND(CAST(e.bill / 3600000000.0 / s.steps AS NUMERIC), 9) AS gpu_hours_per_step
FROM dated AS e
LEFT JOIN stepped AS s ON s.partition = e.partition AND s.day = e.day
ORDER BY e.partition, e.day;
