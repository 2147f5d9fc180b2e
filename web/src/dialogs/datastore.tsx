/** Settings of a datastore: name, description, tags. */
import { useState } from 'preact/hooks';
import { part, patch } from '../api/http';
import type { DatastoreDetails, UpdateDatastore } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, TextArea, WordsField } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';

export const openDatastore = (store: DatastoreDetails, done: () => void) =>
  open((close) => <DatastoreDialog store={store} done={done} close={close} />);

function DatastoreDialog(props: { store: DatastoreDetails; done: () => void; close: () => void }) {
  const { store, done, close } = props;
  // Without a name, the path is shown.
  const [name, setName] = useState(store.name === store.path ? '' : store.name);
  const [description, setDescription] = useState(store.description ?? '');
  const [tags, setTags] = useState(store.tags ?? []);
  const task = useTask();
  const send = () =>
    task.run(async () => {
      const change: UpdateDatastore = { name, description, tags };
      await patch(`/datastores/${part(store.id)}`, change);
      close();
      done();
    });
  return (
    <FormDialog
      title={`Edit ${store.name}`}
      verb="Save"
      needs="admin"
      task={task}
      send={send}
      close={close}
    >
      <Field label="Name" value={name} onInput={setName} hint={`Empty: ${store.path}`} />
      <TextArea label="Description" value={description} onInput={setDescription} />
      <WordsField label="Tags" words={tags} onChange={setTags} hint="Separated by blanks" />
    </FormDialog>
  );
}
