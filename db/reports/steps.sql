-- Effective steps of each job in each UTC hour; hours without a step have no row.
-- A step is an optim_step call that is done and was not skipped. Dates as in usage_by_day.sql.
-- slurm_id is the number that all commands take; job_id the row of this database.
WITH stepped AS (
    SELECT job_id, ended_us / 3600000000 AS hour, COUNT(*) AS steps
    FROM calls
    WHERE kind = 'optim_step' AND state = 'done' AND message = ''
    GROUP BY job_id, ended_us / 3600000000
),
era AS (
    SELECT job_id, hour, steps,
           (hour / 24 + 719468) / 146097 AS n, (hour / 24 + 719468) % 146097 AS doe
    FROM stepped
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
SELECT j.partition, j.slurm_id, j.id AS job_id, j.name, j."user",
       CAST(e.n * 400 + e.yoe + CASE WHEN e.m <= 2 THEN 1 ELSE 0 END AS TEXT)
           || '-' || SUBSTR(CAST(100 + e.m AS TEXT), 2)
           || '-' || SUBSTR(CAST(100 + e.d AS TEXT), 2)
           || ' ' || SUBSTR(CAST(100 + e.hour % 24 AS TEXT), 2) || ':00' AS hour,
       e.steps
FROM dated AS e
JOIN jobs AS j ON j.id = e.job_id
ORDER BY j.partition, j.id, e.hour;
