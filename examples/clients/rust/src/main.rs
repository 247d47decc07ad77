//! Shows the library at work, on the server of DATABASE_URL. Answers are lines of JSON.
//!
//! ```text
//! named-locks-example count LOCK TASKS ROUNDS       tasks count in the table counter, each round under the lock
//! named-locks-example count-xact LOCK TASKS ROUNDS  the same under a lock to the end of a transaction
//! named-locks-example hold LOCK [TIMEOUT_MS]        takes the lock and holds it; a line of input ends that or the waiting
//! named-locks-example lease NAME TTL_MS             holds a lease and writes to the table written at each line of input
//! ```
//!
//! Ends with its input. Exit code: 0 done, 3 lock or lease not to be had, 4 lost, 5 waiting cancelled.

use std::pin::pin;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use named_locks_example::{Error, with_lease, with_lock, xact_lock};
use tokio::io::{AsyncBufReadExt, BufReader, Lines, Stdin, stdin};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_postgres::{Config, GenericClient, NoTls};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const MINUTE: Option<Duration> = Some(Duration::from_secs(60));

#[derive(Clone, Copy)]
enum Form {
    Session,
    Transaction,
}

/// Not atomic: two at once would lose a step.
async fn count(client: &impl GenericClient) -> Result<(), Failure> {
    let value: i32 = client.query_one("SELECT value FROM counter", &[]).await?.get(0);
    sleep(Duration::from_millis(2)).await;
    client.execute("UPDATE counter SET value = $1", &[&(value + 1)]).await?;
    Ok(())
}

async fn count_in_transaction(config: &Config, name: &str) -> Result<(), Failure> {
    let (mut client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    let transaction = client.transaction().await?;
    if !xact_lock(&transaction, name, MINUTE).await? {
        return Err("no lock within a minute".into());
    }
    count(&transaction).await?;
    Ok(transaction.commit().await?)
}

async fn count_in_tasks(config: &Config, name: &str, tasks: usize, rounds: usize, form: Form) -> Result<(), Failure> {
    let mut running = JoinSet::new();
    for _ in 0..tasks {
        let (config, name) = (config.clone(), name.to_owned());
        running.spawn(async move {
            for _ in 0..rounds {
                match form {
                    Form::Session => with_lock(&config, &name, MINUTE, async |client| count(client).await).await?,
                    Form::Transaction => count_in_transaction(&config, &name).await?,
                }
            }
            Ok::<_, Failure>(())
        });
    }
    while let Some(result) = running.join_next().await {
        result??;
    }
    println!(r#"{{"event": "counted"}}"#);
    Ok(())
}

/// False if the waiting was cancelled.
async fn hold(
    config: &Config,
    input: &mut Lines<BufReader<Stdin>>,
    name: &str,
    timeout: Option<Duration>,
) -> Result<bool, Failure> {
    let held = AtomicBool::new(false);
    let stop = Notify::new();
    let mut locking = pin!(with_lock(config, name, timeout, async |_| {
        println!(r#"{{"event": "held"}}"#);
        held.store(true, Ordering::Relaxed);
        stop.notified().await;
        Ok::<_, Failure>(())
    }));
    tokio::select! {
        result = &mut locking => result?,
        _ = input.next_line() => {
            if !held.load(Ordering::Relaxed) {
                return Ok(false); // drops the future, which cancels
            }
            stop.notify_one();
            locking.await?;
        }
    }
    println!(r#"{{"event": "released"}}"#);
    Ok(true)
}

async fn work_under_lease(
    config: &Config,
    input: &mut Lines<BufReader<Stdin>>,
    name: &str,
    ttl: Duration,
) -> Result<(), Failure> {
    with_lease(config, name, ttl, Some(Duration::ZERO), async |lease| {
        // As text: many readers of JSON have 53 bits for a number.
        println!(r#"{{"event": "acquired", "token": "{}"}}"#, lease.token);
        while input.next_line().await?.is_some() {
            lease
                .transaction(async |transaction| {
                    transaction.execute("INSERT INTO written VALUES ($1)", &[&lease.token]).await?;
                    Ok::<_, Failure>(())
                })
                .await?;
            println!(r#"{{"event": "written"}}"#);
        }
        Ok::<_, Failure>(())
    })
    .await?;
    println!(r#"{{"event": "released"}}"#);
    Ok(())
}

async fn run(config: &Config, input: &mut Lines<BufReader<Stdin>>, args: &[&str]) -> Result<u8, Failure> {
    let milliseconds = |text: &str| text.parse().map(Duration::from_millis);
    match args {
        ["count", name, tasks, rounds] => {
            count_in_tasks(config, name, tasks.parse()?, rounds.parse()?, Form::Session).await?;
        }
        ["count-xact", name, tasks, rounds] => {
            count_in_tasks(config, name, tasks.parse()?, rounds.parse()?, Form::Transaction).await?;
        }
        ["hold", name, timeout @ ..] => {
            let timeout = timeout.first().map(|text| milliseconds(text)).transpose()?;
            if !hold(config, input, name, timeout).await? {
                println!(r#"{{"event": "cancelled"}}"#);
                return Ok(5);
            }
        }
        ["lease", name, ttl] => work_under_lease(config, input, name, milliseconds(ttl)?).await?,
        _ => return Err("unknown command".into()),
    }
    Ok(0)
}

/// Tells of an error that a caller should be ready for; the exit code. Others end the program.
fn answer_to(error: Failure) -> Result<u8, Failure> {
    let text = |text: &Option<String>| text.as_ref().map_or("null".to_owned(), |text| format!("{text:?}"));
    match *error.downcast::<Error>()? {
        Error::LockTimeout { detail, .. } => {
            println!(r#"{{"event": "timeout", "detail": {}}}"#, text(&detail));
            Ok(3)
        }
        Error::LeaseTaken { holder, retry_after, .. } => {
            let retry_after = retry_after.as_millis();
            println!(r#"{{"event": "taken", "holder": {}, "retry_after_ms": {retry_after}}}"#, text(&holder));
            Ok(3)
        }
        Error::LockLost { .. } => {
            println!(r#"{{"event": "lost"}}"#);
            Ok(4)
        }
        Error::LeaseLost { sqlstate, .. } => {
            println!(r#"{{"event": "lost", "sqlstate": {}}}"#, text(&sqlstate));
            Ok(4)
        }
        error => Err(error.into()),
    }
}

#[tokio::main]
async fn main() -> Result<ExitCode, Failure> {
    let config: Config = std::env::var("DATABASE_URL")?.parse()?;
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut input = BufReader::new(stdin()).lines();
    let code = match run(&config, &mut input, &args).await {
        Ok(code) => code,
        Err(error) => answer_to(error)?,
    };
    while input.next_line().await?.is_some() {}
    Ok(ExitCode::from(code))
}
