BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num));
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE environments (
	name TEXT NOT NULL, 
	spec TEXT NOT NULL, 
	state TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	updated_at DOUBLE NOT NULL, 
	request_id VARCHAR(16), 
	address TEXT, 
	error TEXT, 
	generation INTEGER DEFAULT 1 NOT NULL, 
	PRIMARY KEY (name), 
	CONSTRAINT ck_environments_state CHECK (state IN ('PENDING', 'STARTING', 'READY', 'DEGRADED', 'ASLEEP', 'FAILED', 'STOPPING', 'STOPPED'))
);
INSERT INTO "environments" VALUES('echo','{"max_sessions":null,"shards":1,"isolate":null,"session_memory_mb":null,"admission_timeout_seconds":5.0,"step_timeout_seconds":null,"reset_first":null,"http_session_idle_seconds":900.0,"max_message_mb":100,"gpus":null,"serve_as_is":false,"host":"127.0.0.1","allow_origin":[],"token":null,"provider":"local","replicas":1,"min_replicas":null,"max_replicas":null,"scale_down_seconds":60.0,"idle_timeout_seconds":null,"env":{},"with_packages":[],"port":null,"gateway":false,"memory_mb":null,"cpus":null,"base":"python:3.11-slim","sandbox":false,"engine_options":[],"ready_timeout_seconds":600.0,"source":"echo","name":"echo","cwd":"@HOME@"}','READY',1.7957956965058217048e+09,1.79579571343085694313e+09,'0121c147f874477e','http://127.0.0.1:@PORT@',NULL,1);
CREATE TABLE events (
	seq INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	kind TEXT NOT NULL, 
	request_id VARCHAR(16), 
	request_seq BIGINT, 
	environment TEXT, 
	data TEXT NOT NULL, 
	PRIMARY KEY (seq)
);
CREATE TABLE expectations (
	operation TEXT NOT NULL, 
	source TEXT NOT NULL, 
	samples TEXT NOT NULL, 
	updated_at DOUBLE NOT NULL, 
	PRIMARY KEY (operation, source)
);
CREATE TABLE generations (
	environment TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	request_id VARCHAR(16) NOT NULL, 
	spec TEXT NOT NULL, 
	state TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	served_at DOUBLE, 
	ended_at DOUBLE, 
	error TEXT, 
	PRIMARY KEY (environment, number), 
	CONSTRAINT ck_generations_state CHECK (state IN ('STARTING', 'SERVING', 'DRAINING', 'RETIRED', 'FAILED'))
);
INSERT INTO "generations" VALUES('echo',1,'0121c147f874477e','{"max_sessions":null,"shards":1,"isolate":null,"session_memory_mb":null,"admission_timeout_seconds":5.0,"step_timeout_seconds":null,"reset_first":null,"http_session_idle_seconds":900.0,"max_message_mb":100,"gpus":null,"serve_as_is":false,"host":"127.0.0.1","allow_origin":[],"token":null,"provider":"local","replicas":1,"min_replicas":null,"max_replicas":null,"scale_down_seconds":60.0,"idle_timeout_seconds":null,"env":{},"with_packages":[],"port":null,"gateway":false,"memory_mb":null,"cpus":null,"base":"python:3.11-slim","sandbox":false,"engine_options":[],"ready_timeout_seconds":600.0,"source":"echo","name":"echo","cwd":"@HOME@"}','SERVING',1.7957956965058217048e+09,1.79579571343085694313e+09,NULL,NULL);
CREATE TABLE marks (
	run_seconds DOUBLE NOT NULL, 
	last_event BIGINT NOT NULL, 
	PRIMARY KEY (run_seconds)
);
INSERT INTO "marks" VALUES(2.70996830076910555362e-02,0);
CREATE TABLE replicas (
	id TEXT NOT NULL, 
	environment TEXT NOT NULL, 
	ordinal INTEGER NOT NULL, 
	provider TEXT NOT NULL, 
	state TEXT NOT NULL, 
	run_dir TEXT NOT NULL, 
	started_at DOUBLE NOT NULL, 
	pid INTEGER, 
	restarts INTEGER NOT NULL, 
	exit TEXT, 
	PRIMARY KEY (id), 
	CONSTRAINT ck_replicas_state CHECK (state IN ('STARTING', 'READY', 'ASLEEP', 'DRAINING', 'BACKING_OFF', 'FAILED', 'STOPPED'))
);
INSERT INTO "replicas" VALUES('echo-0-0121c147f874477e','echo',0,'local','READY','@HOME@/run/echo-0-0121c147f874477e',1.79579571214334678648e+09,15799,0,NULL);
CREATE TABLE requests (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(16) NOT NULL, 
	operation TEXT NOT NULL, 
	schedule TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	state TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	environment TEXT, 
	priority INTEGER NOT NULL, 
	idempotency_key TEXT, 
	attempts INTEGER NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	timeout_seconds DOUBLE, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	cancel_requested_at DOUBLE, 
	worker TEXT, 
	worker_pid INTEGER, 
	worker_started_at DOUBLE, 
	peak_bytes BIGINT, 
	result TEXT, 
	error TEXT, 
	rank DOUBLE DEFAULT 0 NOT NULL, 
	retry_oom INTEGER DEFAULT 0 NOT NULL, 
	memory_bytes BIGINT, 
	lost_daemons INTEGER DEFAULT 0 NOT NULL, 
	traceparent TEXT, 
	CONSTRAINT ck_requests_state CHECK (state IN ('PENDING', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED')), 
	CONSTRAINT ck_requests_schedule CHECK (schedule IN ('LONG', 'SHORT')), 
	CONSTRAINT ck_requests_finished_at CHECK ((finished_at IS NOT NULL) = (state IN ('SUCCEEDED', 'FAILED', 'CANCELLED'))), 
	CONSTRAINT ck_requests_started_at CHECK (state != 'RUNNING' OR (started_at IS NOT NULL AND attempts > 0)), 
	CONSTRAINT ck_requests_error CHECK (error IS NULL OR state = 'FAILED')
);
INSERT INTO "requests" VALUES(1,'0121c147f874477e','launch','LONG','{"max_sessions":null,"shards":1,"isolate":null,"session_memory_mb":null,"admission_timeout_seconds":5.0,"step_timeout_seconds":null,"reset_first":null,"http_session_idle_seconds":900.0,"max_message_mb":100,"gpus":null,"serve_as_is":false,"host":"127.0.0.1","allow_origin":[],"token":null,"provider":"local","replicas":1,"min_replicas":null,"max_replicas":null,"scale_down_seconds":60.0,"idle_timeout_seconds":null,"env":{},"with_packages":[],"port":null,"gateway":false,"memory_mb":null,"cpus":null,"base":"python:3.11-slim","sandbox":false,"engine_options":[],"ready_timeout_seconds":600.0,"drain_timeout_seconds":600.0,"source":"echo","name":"echo","update":null,"replaces":null,"cwd":"@HOME@"}','SUCCEEDED',1.79579569650584840775e+09,'echo',0,NULL,1,3,NULL,1.795795696676299572e+09,1.79579571339521765704e+09,NULL,'long-1',14964,1.1689827309772390625e+13,11747328,'{"environment":{"name":"echo","state":"READY","address":"http://127.0.0.1:@PORT@","has_token":false,"is_exposed":false,"replicas":[{"id":"echo-0-0121c147f874477e","ordinal":0,"run_dir":"@HOME@/run/echo-0-0121c147f874477e","pid":15799,"max_sessions":1024,"memory_bytes":19415040,"notes":[],"sessions_fail":null,"serving":"sessions","route":null}]}}',NULL,1.99406519997864961624e-01,0,NULL,0,NULL);
CREATE TABLE tally (
	id INTEGER NOT NULL, 
	last_event BIGINT NOT NULL, 
	pending BIGINT NOT NULL, 
	running BIGINT NOT NULL, 
	succeeded BIGINT NOT NULL, 
	failed BIGINT NOT NULL, 
	cancelled BIGINT NOT NULL, 
	run_seconds DOUBLE DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT ck_tally_one_row CHECK (id = 1)
);
INSERT INTO "tally" VALUES(1,14,0,0,1,0,0,2.70996830076910555362e-02);
CREATE UNIQUE INDEX ix_requests_idempotency_key ON requests (idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX ix_requests_environment ON requests (environment, seq) WHERE environment IS NOT NULL;
CREATE INDEX ix_requests_unfinished ON requests (seq) WHERE finished_at IS NULL;
CREATE INDEX ix_requests_claim ON requests (schedule, rank, seq) WHERE state = 'PENDING';
CREATE INDEX ix_requests_failed ON requests (seq) WHERE state = 'FAILED';
CREATE UNIQUE INDEX ix_requests_id ON requests (id);
CREATE INDEX ix_replicas_environment ON replicas (environment);
CREATE INDEX ix_events_request_seq ON events (request_seq);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('requests',1);
COMMIT;
