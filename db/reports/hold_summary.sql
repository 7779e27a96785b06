-- Time held per WPG and what became of it; difference must be 0.
-- held = GPU-microseconds of the WPG's stays in the hold; a stay that has not ended counts up
-- to its last booked stretch. difference = held - busy - switch - kept - idle - down.
WITH booked AS (
    SELECT hold_id, wpg,
           MAX(stop_us) AS last_us,
           CAST(SUM(CASE WHEN activity = 'busy' THEN gpu_us ELSE 0 END) AS BIGINT) AS busy,
           CAST(SUM(CASE WHEN activity = 'switch' THEN gpu_us ELSE 0 END) AS BIGINT) AS switch,
           CAST(SUM(CASE WHEN activity = 'kept' THEN gpu_us ELSE 0 END) AS BIGINT) AS kept,
           CAST(SUM(CASE WHEN activity = 'idle' THEN gpu_us ELSE 0 END) AS BIGINT) AS idle,
           CAST(SUM(CASE WHEN activity = 'down' THEN gpu_us ELSE 0 END) AS BIGINT) AS down
    FROM ledger
    GROUP BY hold_id, wpg
),
stays AS (
    SELECT w.hold_id, w.name AS wpg, MIN(w.pool) AS pool, MAX(w.gpus) AS gpus,
           CAST(SUM((COALESCE(w.released_us,
                              CASE WHEN b.last_us > w.held_us THEN b.last_us ELSE w.held_us END)
                     - w.held_us) * w.gpus) AS BIGINT) AS held
    FROM wpgs AS w
    LEFT JOIN booked AS b ON b.hold_id = w.hold_id AND b.wpg = w.name
    GROUP BY w.hold_id, w.name
)
SELECT s.hold_id, s.wpg, s.pool, s.gpus,
       s.held AS held_gpu_us,
       COALESCE(b.busy, 0) AS busy_gpu_us,
       COALESCE(b.switch, 0) AS switch_gpu_us,
       COALESCE(b.kept, 0) AS kept_gpu_us,
       COALESCE(b.idle, 0) AS idle_gpu_us,
       COALESCE(b.down, 0) AS down_gpu_us,
       s.held - COALESCE(b.busy + b.switch + b.kept + b.idle + b.down, 0) AS difference_gpu_us
FROM stays AS s
LEFT JOIN booked AS b ON b.hold_id = s.hold_id AND b.wpg = s.wpg
ORDER BY s.hold_id, s.wpg;
