//! Long random lives of a guest, by seed.

use godwit_migration::PageIn;

use crate::choices::Choice;
use crate::dice::Dice;
use crate::rules::Rules;
use crate::world::{Limits, Options, World};

/// Parameters of one run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Seed of all random choices.
    pub seed: u64,
    /// Decisions of agents.
    pub rules: Rules,
}

/// Statistics of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Number of events.
    pub steps: u64,
    /// Number of faults among them.
    pub faults: u64,
    /// Number of migrations begun.
    pub begun: u64,
    /// Number of migrations completed.
    pub completed: u64,
    /// Number of doubts settled without an operator.
    pub settled: u64,
    /// Number of cuts after which a migration continued where it was.
    pub resumed: u64,
    /// Number of guests lost with their memory in a fault.
    pub dead: u64,
    /// Number of VMs that were deleted and created again.
    pub created: u64,
}

/// Steps between two checks for a way out.
const LOOK_EVERY: u64 = 16;
/// Maximum steps of a run.
const MOST_STEPS: u64 = 6_000;

/// Lets a guest live through migrations and faults.
///
/// # Errors
/// The violation, and all events that led to it.
pub fn simulate(plan: Plan) -> Result<Figures, String> {
    let mut dice = Dice(plan.seed);
    let page_in = if dice.below(2) == 0 { PageIn::Never } else { PageIn::Now };
    let options = Options {
        hosts: 2 + dice.place(2),
        pages: 1 + dice.place(24),
        ordered: true,
        page_in,
        moves_disks: plan.seed.is_multiple_of(3),
        rules: plan.rules,
        ..Options::default()
    };
    let few = |dice: &mut Dice, most: u64| u32::try_from(dice.below(most + 1)).unwrap_or(0);
    let limits = Limits {
        migrations: 4 + few(&mut dice, 4),
        agent_crashes: few(&mut dice, 5),
        host_crashes: few(&mut dice, 1),
        qemu_crashes: u32::from(dice.below(4) == 0),
        cuts: few(&mut dice, 4),
        losses: few(&mut dice, 4),
        full_disks: few(&mut dice, 2),
        cancels: few(&mut dice, 2),
        give_ups: few(&mut dice, 2),
        lives: few(&mut dice, 2),
        strangers: few(&mut dice, 1),
        failed_writes: few(&mut dice, 3),
    };
    let mut world = World::new(options, limits);
    let mut log = Vec::new();
    let mut figures = Figures::default();
    // Some lives are calm, some are not.
    let fault_every = 8 + dice.below(120);
    while figures.steps < MOST_STEPS {
        if figures.steps.is_multiple_of(LOOK_EVERY) {
            world.heals().map_err(|why| story(&log, &why))?;
        }
        let Some(choice) = draw(&world, &mut dice, fault_every) else { break };
        log.push(world.describe(choice));
        figures.begun += u64::from(matches!(choice, Choice::Migrate(..)));
        figures.faults += u64::from(choice.is_fault());
        figures.steps += 1;
        world.apply(choice);
        if let Some(violation) = world.violation() {
            return Err(story(&log, violation));
        }
    }
    world.heals().map_err(|why| story(&log, &why))?;
    figures.completed = u64::from(world.completed());
    figures.settled = u64::from(world.settled());
    figures.resumed = u64::from(world.resumed());
    figures.dead = u64::from(world.dead);
    figures.created = u64::from(world.life);
    Ok(figures)
}

fn story(log: &[String], why: &str) -> String {
    format!("{why}\nafter:\n{}", log.join("\n"))
}

fn draw(world: &World, dice: &mut Dice, fault_every: u64) -> Option<Choice> {
    let (faults, ordinary): (Vec<_>, Vec<_>) =
        world.choices().into_iter().partition(Choice::is_rare);
    if !faults.is_empty() && dice.below(fault_every) == 0 {
        return Some(faults[dice.place(faults.len())]);
    }
    let running = (0..world.hosts.len()).find(|&host| world.is_running(host));
    if let Some(host) = running
        && dice.below(3) == 0
        && !ordinary.is_empty()
    {
        return Some(Choice::Work(host, dice.place(world.options.pages)));
    }
    (!ordinary.is_empty()).then(|| ordinary[dice.place(ordinary.len())])
}
