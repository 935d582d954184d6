//! Writing the shards of a checkpoint: which jobs are next, and who writes the files.
//!
//! Each open shard has a writer thread, because file systems let one thread at a time write to a
//! file. The threads of the [team](crate::pipeline) read and compute, and hand their results to the
//! writer threads. A few shards are open at a time, so that several files are written at once and
//! shards are finished one after the other.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

use microscale::Device;

use crate::error::{Error, Result};
use crate::pipeline::failure::Failure;
use crate::pipeline::reply::Reply;
use crate::pipeline::{Next, PATIENCE, Team, Worker, lock};
use crate::progress::Meter;
use crate::read::shard::Shard;
use crate::write::begin::begin;
use crate::write::job::{Job, of_shard};
use crate::write::sink::{Item, Sink};
use crate::write::work::{Renamed, Rewrite};
use crate::write::writer::Writer;

/// Shards that the CPU's threads work on at a time.
const MOST_OPEN: usize = 4;

/// Shards that may wait for the disk at once, each with an open file and a thread.
const MOST_FINISHING: usize = 2;

/// Pieces that may wait for a writer thread.
const QUEUED: usize = 32;

/// A shard, and the file that is to be written of it.
pub(crate) struct ShardOutput<'a> {
    pub(crate) shard: &'a Shard,
    /// The number of the shard in the checkpoint.
    pub(crate) number: usize,
    pub(crate) path: PathBuf,
}

/// Jobs of a shard that are carried out together, by their numbers in the shard.
type Unit = Vec<usize>;

/// A shard that is being written.
struct Open<O> {
    /// Its place in the list of outputs.
    index: usize,
    /// The number of the shard's first job among all.
    first_job: usize,
    /// Units that no thread has taken yet.
    units: VecDeque<Unit>,
    /// The number of units being worked on.
    driven: usize,
    writer: Arc<Writer>,
    queue: Option<SyncSender<Item>>,
    /// The number of the first output of each job in the file.
    first_outputs: Vec<usize>,
    renamed: Renamed,
    /// The outcomes of the jobs that are done.
    outcomes: Vec<Option<O>>,
}

/// The shards and the jobs that are still to do.
struct Schedule<'w, R: Rewrite> {
    outputs: &'w [ShardOutput<'w>],
    work: &'w R,
    /// The most shards that are open.
    lanes: usize,
    /// The first shard that is not open yet.
    next: usize,
    open: Vec<Open<R::Outcome>>,
    /// The number of units that threads have taken so far.
    taken: usize,
    stopped: bool,
}

/// Starts a thread that writes the pieces of a shard, if the system allows another thread.
type StartWriter<'s> = dyn Fn(usize, &Arc<Writer>) -> Option<SyncSender<Item>> + 's;

/// A unit that a thread has taken.
struct Taken {
    index: usize,
    unit: Unit,
    /// The numbers of the unit's jobs among all.
    jobs: Vec<usize>,
    sinks: Vec<Sink>,
}

/// A message to the thread that reports progress.
enum Event<O> {
    /// A tensor of this name comes next.
    Begins(String),
    /// A unit is done, with `bytes` bytes of the input.
    Done { bytes: u64 },
    /// All jobs of a shard are done.
    Written { index: usize, renamed: Renamed, outcomes: Vec<O> },
    /// A shard is on the disk. Its file has `bytes` bytes.
    Finished { index: usize, bytes: u64 },
    /// An error in the shard of this number, which ends a unit if it is one of a unit.
    Failed { index: usize, error: Error, unit: bool },
}

/// Writes shards to files that do not exist yet, and returns the outcomes of their jobs, in the
/// order of the shards. `complete` is called for each shard once it is on the disk, in any order,
/// with the bytes of its file.
///
/// # Errors
/// The error of the first shard that has one; [`Error::Interrupted`]; [`Error::Threads`]; errors of
/// `complete`.
pub(crate) fn write_shards<R: Rewrite>(
    outputs: &[ShardOutput<'_>],
    work: &R,
    device: &Device,
    meter: &mut Meter<'_, '_>,
    complete: impl FnMut(&ShardOutput<'_>, Renamed, u64, &[R::Outcome]) -> Result<()>,
) -> Result<Vec<R::Outcome>> {
    let largest = work.jobs().iter().map(|job| work.device_bytes(job)).max();
    let devices = device.workers(largest.unwrap_or(0)).map_err(Error::Device)?;
    write_on(&devices, outputs, work, meter, complete)
}

/// [`write_shards`] with a thread for each device.
fn write_on<'w, R: Rewrite>(
    devices: &'w [Device],
    outputs: &'w [ShardOutput<'w>],
    work: &'w R,
    meter: &mut Meter<'_, '_>,
    mut complete: impl FnMut(&ShardOutput<'_>, Renamed, u64, &[R::Outcome]) -> Result<()>,
) -> Result<Vec<R::Outcome>> {
    let has_memory = devices.first().is_some_and(Device::has_memory);
    let lanes = if has_memory { devices.len() } else { MOST_OPEN.min(devices.len()) };
    let team = Team::new(lanes);
    let mut written: Vec<_> = outputs.iter().map(|_| None).collect();
    let mut failure = Failure::default();
    let (mut finished, mut returned) = (0, 0);
    let (tell, messages) = mpsc::channel();
    // Shards that wait for the disk.
    let finishing = AtomicUsize::new(0);
    let (next, open, taken, stopped) = (0, Vec::new(), 0, false);
    let schedule = Mutex::new(Schedule { outputs, work, lanes, next, open, taken, stopped });
    std::thread::scope(|scope| {
        let start_writer = |index: usize, writer: &Arc<Writer>| {
            let (queue, pieces) = mpsc::sync_channel(QUEUED);
            let (writer, tell, team, finishing) = (writer.clone(), tell.clone(), &team, &finishing);
            let write = move || {
                write_pieces(index, &writer, pieces, finishing, &tell);
                team.wake();
            };
            Builder::new().spawn_scoped(scope, write).is_ok().then_some(queue)
        };
        let take = || {
            let mut schedule = lock(&schedule);
            let has_room = finishing.load(Ordering::Relaxed) < MOST_FINISHING;
            schedule.take(has_room, &start_writer).unwrap_or_else(|error| {
                schedule.stopped = true;
                let index = schedule.next - 1;
                let _ = tell.send(Event::Failed { index, error, unit: false });
                Next::None
            })
        };
        let drive = |taken: Taken, worker: &Worker<'_, 'w>| {
            if let Some(open) = drive(taken, &schedule, work, worker, &tell) {
                open.end(&finishing, &tell);
            }
        };
        let meanwhile = || {
            // After an error, units that no thread has taken are left out.
            while if failure.is_some() { returned < lock(&schedule).taken } else { finished < outputs.len() }
            {
                let mut go_on = Ok(());
                match messages.recv_timeout(PATIENCE) {
                    Err(RecvTimeoutError::Disconnected) => break,
                    Ok(Event::Done { bytes }) => {
                        (meter.done, returned) = (meter.done + bytes, returned + 1);
                    }
                    Ok(Event::Written { index, renamed, outcomes }) => {
                        written[index] = Some((Some(renamed), outcomes));
                    }
                    Ok(Event::Failed { index, error, unit }) => {
                        returned += usize::from(unit);
                        failure.at(index, error);
                    }
                    _ if failure.is_some() => continue,
                    Err(RecvTimeoutError::Timeout) => go_on = meter.again(),
                    Ok(Event::Begins(tensor)) => go_on = meter.before(&tensor),
                    Ok(Event::Finished { index, bytes }) => {
                        finished += 1;
                        if let Some((renamed, outcomes)) = &mut written[index] {
                            let renamed = renamed.take().unwrap_or_default();
                            let done = complete(&outputs[index], renamed, bytes, outcomes);
                            done.unwrap_or_else(|error| failure.at(index, error));
                        }
                    }
                }
                if let Err(error) = go_on {
                    team.interrupt();
                    failure.by_caller(error);
                }
                if failure.is_some() {
                    lock(&schedule).stopped = true;
                    team.wake();
                }
            }
        };
        let done = team.run(devices, &take, &drive, meanwhile);
        // Writer threads end when nothing can come any more.
        lock(&schedule).open.clear();
        done
    })?;
    failure.into_result()?;
    Ok(written.into_iter().flatten().flat_map(|(_, outcomes)| outcomes).collect())
}

/// Carries out a unit. Returns the shard if all its jobs are done now.
fn drive<'w, R: Rewrite>(
    Taken { index, unit, jobs, sinks }: Taken,
    schedule: &Mutex<Schedule<'w, R>>,
    work: &'w R,
    worker: &Worker<'_, 'w>,
    tell: &Sender<Event<R::Outcome>>,
) -> Option<Open<R::Outcome>> {
    // The receiver outlives all threads.
    let say = |message| drop(tell.send(message));
    let all = work.jobs();
    jobs.iter().for_each(|job| say(Event::Begins(all[*job].tensor.name.into())));
    let panicked = Event::Failed { index, error: Error::Interrupted, unit: true };
    let mut reply = Reply::new(tell, panicked);
    let outcomes = match work.write(&jobs, worker, &sinks) {
        Ok(outcomes) => outcomes,
        Err(error) => {
            reply.message = Some(Event::Failed { index, error, unit: true });
            return None;
        }
    };
    let stored = jobs.iter().map(|job| &all[*job].tensor);
    let bytes = stored.clone().map(|tensor| tensor.data.len() as u64).sum();
    work.checkpoint().forget_all(stored);
    reply.message = Some(Event::Done { bytes });
    lock(schedule).give(index, &unit, outcomes)
}

/// Writes what comes from a queue, and finishes the file after the last piece.
fn write_pieces<O>(
    index: usize,
    writer: &Writer,
    pieces: Receiver<Item>,
    finishing: &AtomicUsize,
    tell: &Sender<Event<O>>,
) {
    for item in pieces {
        let done = match item {
            Item::Piece(piece) => writer.write_at(piece.position, &piece.data).map(|()| None),
            Item::End => {
                let finished = writer.finish().map(Some);
                finishing.fetch_sub(1, Ordering::Relaxed);
                finished
            }
        };
        let message = match done {
            Ok(None) => continue,
            Ok(Some(bytes)) => Event::Finished { index, bytes },
            Err(error) => Event::Failed { index, error, unit: false },
        };
        // The receiver outlives all threads.
        let _ = tell.send(message);
        return;
    }
}

impl<O: Send> Open<O> {
    /// Lets a shard be finished whose jobs are all done.
    fn end(self, finishing: &AtomicUsize, tell: &Sender<Event<O>>) {
        let Self { index, writer, queue, renamed, outcomes, .. } = self;
        let outcomes = outcomes.into_iter().flatten().collect();
        let _ = tell.send(Event::Written { index, renamed, outcomes });
        if let Some(queue) = queue {
            finishing.fetch_add(1, Ordering::Relaxed);
            // A writer thread that failed has reported its error.
            let _ = queue.send(Item::End);
            return;
        }
        let message = match writer.finish() {
            Ok(bytes) => Event::Finished { index, bytes },
            Err(error) => Event::Failed { index, error, unit: false },
        };
        let _ = tell.send(message);
    }
}

impl<R: Rewrite> Schedule<'_, R> {
    /// Takes the next unit. An error is about the shard before `next`.
    fn take(&mut self, has_room: bool, start_writer: &StartWriter<'_>) -> Result<Next<Taken>> {
        if self.stopped {
            return Ok(Next::None);
        }
        let least = self.least_driven();
        let all_busy = least.is_none_or(|open| self.open[open].driven > 0);
        let more = self.next < self.outputs.len();
        let open = if all_busy && more && has_room && self.open.len() < self.lanes {
            Some(self.open_next(start_writer)?)
        } else {
            least
        };
        let Some(open) = open else { return Ok(if more { Next::Later } else { Next::None }) };
        let open = &mut self.open[open];
        let Some(unit) = open.units.pop_front() else { return Ok(Next::Later) };
        (open.driven, self.taken) = (open.driven + 1, self.taken + 1);
        let jobs = unit.iter().map(|job| open.first_job + job).collect();
        let sinks = unit.iter().map(|job| {
            let (writer, queue) = (open.writer.clone(), open.queue.clone());
            Sink { writer, first: open.first_outputs[*job], queue }
        });
        let sinks = sinks.collect();
        Ok(Next::Unit(Taken { index: open.index, unit, jobs, sinks }))
    }

    /// The first of the shards with units left on which the fewest threads work.
    fn least_driven(&self) -> Option<usize> {
        let waiting = self.open.iter().enumerate().filter(|(_, open)| !open.units.is_empty());
        waiting.min_by_key(|(_, open)| (open.driven, open.index)).map(|(open, _)| open)
    }

    /// Begins another shard.
    fn open_next(&mut self, start_writer: &StartWriter<'_>) -> Result<usize> {
        let index = self.next;
        self.next += 1;
        let ShardOutput { number, path, .. } = &self.outputs[index];
        let (renamed, writer) = begin(*number, path, self.work)?;
        let all = self.work.jobs();
        let first_job = all.partition_point(|job| job.position.shard < *number);
        let jobs = of_shard(all, *number);
        let first_outputs = jobs.iter().scan(0, |next, job| {
            let first = *next;
            *next += job.outputs.len();
            Some(first)
        });
        let first_outputs = first_outputs.collect();
        let (units, outcomes) = (self.units(jobs), jobs.iter().map(|_| None).collect());
        let writer = Arc::new(writer);
        let queue = start_writer(index, &writer);
        let driven = 0;
        self.open.push(Open {
            index,
            first_job,
            units,
            driven,
            writer,
            queue,
            first_outputs,
            renamed,
            outcomes,
        });
        Ok(self.open.len() - 1)
    }

    /// The jobs of a shard, each by itself or with the other jobs of its layer.
    fn units(&self, jobs: &[Job<'_, R::Plan>]) -> VecDeque<Unit> {
        let (mut units, mut layers): (VecDeque<Unit>, HashMap<_, usize>) = Default::default();
        for (number, job) in jobs.iter().enumerate() {
            let last = units.len();
            let unit = self.work.layer(job).map_or(last, |layer| *layers.entry(layer).or_insert(last));
            match units.get_mut(unit) {
                Some(unit) => unit.push(number),
                None => units.push_back(vec![number]),
            }
        }
        if units.is_empty() {
            // A shard without tensors becomes a file, too.
            units.push_back(Vec::new());
        }
        units
    }

    /// Notes the outcomes of a unit. Returns the shard if all its jobs are done now.
    fn give(&mut self, index: usize, unit: &[usize], outcomes: Vec<R::Outcome>) -> Option<Open<R::Outcome>> {
        let place = self.open.iter().position(|open| open.index == index)?;
        let open = &mut self.open[place];
        for (number, outcome) in unit.iter().zip(outcomes) {
            open.outcomes[*number] = Some(outcome);
        }
        open.driven -= 1;
        (open.driven == 0 && open.units.is_empty()).then(|| self.open.swap_remove(place))
    }
}
