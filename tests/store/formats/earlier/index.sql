BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0003');
CREATE TABLE counters (
	name VARCHAR(16) NOT NULL, 
	value BIGINT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "counters" VALUES('revision',8);
INSERT INTO "counters" VALUES('built',1795446404538);
CREATE TABLE keys (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "keys" VALUES(1,'model.position.0.per_head');
INSERT INTO "keys" VALUES(2,'train.warmup');
INSERT INTO "keys" VALUES(3,'task.sparse_blanks');
INSERT INTO "keys" VALUES(4,'train.schedule');
INSERT INTO "keys" VALUES(5,'train.steps');
INSERT INTO "keys" VALUES(6,'train.lr');
INSERT INTO "keys" VALUES(7,'model.position.0.rotated_query');
INSERT INTO "keys" VALUES(8,'evaluate.sequences');
INSERT INTO "keys" VALUES(9,'evaluate.final_sequences');
INSERT INTO "keys" VALUES(10,'evaluate.contexts');
INSERT INTO "keys" VALUES(11,'model.position.0.p_max');
INSERT INTO "keys" VALUES(12,'train.batch');
INSERT INTO "keys" VALUES(13,'task.vocabulary');
INSERT INTO "keys" VALUES(14,'task.tokens');
INSERT INTO "keys" VALUES(15,'model.position.0.gate_after_rotation');
INSERT INTO "keys" VALUES(16,'train.optimizer');
INSERT INTO "keys" VALUES(17,'model.dropout');
INSERT INTO "keys" VALUES(18,'task.kind');
INSERT INTO "keys" VALUES(19,'evaluate.every');
INSERT INTO "keys" VALUES(20,'model.position.0.scale_positions');
INSERT INTO "keys" VALUES(21,'model.position.0.kind');
INSERT INTO "keys" VALUES(22,'train.betas');
INSERT INTO "keys" VALUES(23,'model.hard_attention');
INSERT INTO "keys" VALUES(24,'model.heads');
INSERT INTO "keys" VALUES(25,'model.tied');
INSERT INTO "keys" VALUES(26,'train.weight_decay');
INSERT INTO "keys" VALUES(27,'model.dim');
INSERT INTO "keys" VALUES(28,'train.clip');
INSERT INTO "keys" VALUES(29,'model.layers');
INSERT INTO "keys" VALUES(30,'task.blanks');
INSERT INTO "keys" VALUES(31,'task.copy_from');
INSERT INTO "keys" VALUES(32,'evaluate.validation');
INSERT INTO "keys" VALUES(33,'model.position');
INSERT INTO "keys" VALUES(34,'model.position.0.gate');
INSERT INTO "keys" VALUES(35,'train.eps');
INSERT INTO "keys" VALUES(36,'model.position.0.share_layers');
INSERT INTO "keys" VALUES(37,'model.family');
INSERT INTO "keys" VALUES(38,'task.dense_blanks');
INSERT INTO "keys" VALUES(39,'facts.peak_memory_bytes');
INSERT INTO "keys" VALUES(40,'facts.host');
INSERT INTO "keys" VALUES(41,'dense/token_error');
INSERT INTO "keys" VALUES(42,'facts.checkpoint_activations');
INSERT INTO "keys" VALUES(43,'in_dist/loss');
INSERT INTO "keys" VALUES(44,'sparse/token_error');
INSERT INTO "keys" VALUES(45,'facts.tokens_per_s');
INSERT INTO "keys" VALUES(46,'sparse/sequence_error');
INSERT INTO "keys" VALUES(47,'in_dist/sequence_error');
INSERT INTO "keys" VALUES(48,'facts.device');
INSERT INTO "keys" VALUES(49,'facts.worker_id');
INSERT INTO "keys" VALUES(50,'facts.steps');
INSERT INTO "keys" VALUES(51,'in_dist/token_error');
INSERT INTO "keys" VALUES(52,'train/loss');
INSERT INTO "keys" VALUES(53,'train/lr');
INSERT INTO "keys" VALUES(54,'facts.workers');
INSERT INTO "keys" VALUES(55,'facts.compile');
INSERT INTO "keys" VALUES(56,'facts.precision');
INSERT INTO "keys" VALUES(57,'facts.model_flops_per_s');
INSERT INTO "keys" VALUES(58,'facts.resumed_from_step');
INSERT INTO "keys" VALUES(59,'facts.torch');
INSERT INTO "keys" VALUES(60,'facts.parameters');
INSERT INTO "keys" VALUES(61,'sparse/loss');
INSERT INTO "keys" VALUES(62,'dense/loss');
INSERT INTO "keys" VALUES(63,'facts.train_s');
INSERT INTO "keys" VALUES(64,'dense/sequence_error');
INSERT INTO "keys" VALUES(65,'facts.threads');
INSERT INTO "keys" VALUES(66,'facts.micro_batch');
INSERT INTO "keys" VALUES(67,'facts.python');
INSERT INTO "keys" VALUES(68,'facts.wall_s');
CREATE TABLE locks (
	name TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	expires_s FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE mirrored (
	tracker TEXT NOT NULL, 
	item VARCHAR(64) NOT NULL, 
	revision BIGINT NOT NULL, 
	tracked_id TEXT, 
	PRIMARY KEY (tracker, item)
);
CREATE TABLE parts (
	id INTEGER NOT NULL, 
	section VARCHAR(16) NOT NULL, 
	digest VARCHAR(32) NOT NULL, 
	content JSON NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "parts" VALUES(1,'task','0803f6b3bebff957f17648190e0de839','{"task.kind": "selective_copy", "task.tokens": 1, "task.blanks": 1, "task.dense_blanks": 1, "task.sparse_blanks": 2, "task.vocabulary": 4, "task.copy_from": "markers"}');
INSERT INTO "parts" VALUES(2,'model','3c0b45fb50b5e75bdd13b812e18c434d','{"model.family": "gpt2", "model.layers": 1, "model.dim": 4, "model.heads": 1, "model.dropout": 0, "model.tied": true, "model.hard_attention": false, "model.position": "cope", "model.position.0.kind": "cope", "model.position.0.gate": "keys", "model.position.0.gate_after_rotation": false, "model.position.0.rotated_query": false, "model.position.0.p_max": 64, "model.position.0.share_layers": false, "model.position.0.per_head": false, "model.position.0.scale_positions": false}');
INSERT INTO "parts" VALUES(3,'train','14c7058296db6525c1f0d19cc74da7cd','{"train.steps": 200, "train.batch": 2, "train.optimizer": "adamw", "train.lr": 0.001, "train.betas": "0.9,0.999", "train.eps": 1e-08, "train.weight_decay": 0.01, "train.warmup": 0, "train.schedule": "constant", "train.clip": 1}');
INSERT INTO "parts" VALUES(4,'evaluate','d491dc780947e76f0a0ac9eabc887f38','{"evaluate.every": 100, "evaluate.sequences": 2, "evaluate.final_sequences": 2, "evaluate.validation": false, "evaluate.contexts": "none"}');
CREATE TABLE runs (
	id INTEGER NOT NULL, 
	run_id VARCHAR(16) NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	seed BIGINT NOT NULL, 
	step BIGINT NOT NULL, 
	steps BIGINT NOT NULL, 
	attempt INTEGER NOT NULL, 
	worker_id TEXT, 
	message TEXT, 
	sweep_id VARCHAR(64), 
	parent_id VARCHAR(16), 
	created_ms BIGINT, 
	updated_ms BIGINT, 
	ended_ms BIGINT, 
	revision BIGINT NOT NULL, 
	owner TEXT, 
	expires_s FLOAT, 
	task_part INTEGER, 
	model_part INTEGER, 
	train_part INTEGER, 
	evaluate_part INTEGER, 
	metrics JSON NOT NULL, 
	facts JSON NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(evaluate_part) REFERENCES parts (id), 
	FOREIGN KEY(model_part) REFERENCES parts (id), 
	FOREIGN KEY(task_part) REFERENCES parts (id), 
	FOREIGN KEY(train_part) REFERENCES parts (id), 
	UNIQUE (run_id)
);
INSERT INTO "runs" VALUES(1,'eccea3c2888d2bdb','finished',0,200,200,1,'host:1',NULL,'20261123-150644-ade9',NULL,1795446413173,1795446413174,1795446416041,5,NULL,NULL,1,2,3,4,'{"train/loss": 0.6348549723625183, "train/lr": 0.001, "in_dist/token_error": 0.0, "in_dist/sequence_error": 0.0, "in_dist/loss": 0.6015444993972778, "dense/token_error": 0.0, "dense/sequence_error": 0.0, "dense/loss": 0.6141541600227356, "sparse/token_error": 0.0, "sparse/sequence_error": 0.0, "sparse/loss": 0.6021169424057007}','{"steps": 200, "resumed_from_step": 0, "train_s": 1.032, "wall_s": 2.858, "tokens_per_s": 1239.7, "model_flops_per_s": 2171954.4, "parameters": 524, "peak_memory_bytes": 910307328, "device": "cpu", "precision": "fp32", "threads": 1, "workers": 1, "micro_batch": 2, "checkpoint_activations": false, "compile": false, "worker_id": "host:1", "host": "host", "python": "3.11.7", "torch": "2.15.0+cu132"}');
INSERT INTO "runs" VALUES(2,'f7ee6b06d686d034','interrupted',1,80,200,1,'host:1',NULL,'20261123-150644-ade9',NULL,1795446416048,1795446416266,1795446416266,7,NULL,NULL,1,2,3,4,'{}','{}');
CREATE TABLE sweep_runs (
	sweep_id VARCHAR(64) NOT NULL, 
	ordinal INTEGER NOT NULL, 
	run_id VARCHAR(16) NOT NULL, 
	"row" TEXT NOT NULL, 
	seed BIGINT NOT NULL, 
	labels JSON NOT NULL, 
	reused BOOLEAN NOT NULL, 
	PRIMARY KEY (sweep_id, ordinal), 
	FOREIGN KEY(sweep_id) REFERENCES sweeps (sweep_id)
)
 WITHOUT ROWID

;
INSERT INTO "sweep_runs" VALUES('20261123-150644-ade9',0,'eccea3c2888d2bdb','base',0,'{}',0);
INSERT INTO "sweep_runs" VALUES('20261123-150644-ade9',1,'f7ee6b06d686d034','base',1,'{}',0);
CREATE TABLE sweeps (
	sweep_id VARCHAR(64) NOT NULL, 
	ablation TEXT NOT NULL, 
	title TEXT NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	executor VARCHAR(16) NOT NULL, 
	started_ms BIGINT NOT NULL, 
	ended_ms BIGINT, 
	runs INTEGER NOT NULL, 
	reused INTEGER NOT NULL, 
	revision BIGINT NOT NULL, 
	owner TEXT, left_out INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (sweep_id)
);
INSERT INTO "sweeps" VALUES('20261123-150644-ade9','tiny','A tiny copy','interrupted','local',1795446404576,1795446416849,2,0,8,NULL,0);
CREATE INDEX sweeps_by_ablation ON sweeps (ablation, started_ms);
CREATE INDEX runs_by_evaluate ON runs (evaluate_part);
CREATE INDEX runs_by_id_and_status ON runs (run_id, status);
CREATE INDEX runs_by_model ON runs (model_part);
CREATE INDEX runs_by_owner ON runs (owner);
CREATE INDEX runs_by_revision ON runs (revision);
CREATE INDEX runs_by_status ON runs (status);
CREATE INDEX runs_by_task ON runs (task_part);
CREATE INDEX runs_by_train ON runs (train_part);
CREATE INDEX sweep_runs_by_run ON sweep_runs (run_id, sweep_id);
COMMIT;
